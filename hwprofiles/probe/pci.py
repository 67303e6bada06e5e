"""How is a device attached to its host?

Read from what the Linux kernel says of a PCIe device. A link may sleep while idle, so ask while it works.
"""

from pathlib import Path

from .device import PciLink

DEVICES = Path("/sys/bus/pci/devices")
GENERATION = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}  # by transfers per second and lane, in GT/s


def pci_folder(domain: int, bus: int, device: int, devices: Path = DEVICES) -> Path:
    """Where the kernel tells of the device of that address."""
    return devices / f"{domain:04x}:{bus:02x}:{device:02x}.0"


def pci_link(folder: Path) -> PciLink | None:
    """The device's link; None where the kernel does not say."""
    try:
        speed, most_speed = (_generation(folder / f"{which}_link_speed") for which in ("current", "max"))
        width, most_width = (int((folder / f"{which}_link_width").read_text()) for which in ("current", "max"))
    except (OSError, ValueError, KeyError, IndexError):
        return None
    return PciLink(speed, width, most_speed, most_width) if 0 < width <= most_width <= 32 else None


def _generation(path: Path) -> int:
    return GENERATION[float(path.read_text().split()[0])]  # "32.0 GT/s PCIe"
