"""Profiles with memory sizes that are not sold for their machine."""

from penstock.hwprofiles.schema import Profile


def with_any_memory(profile: Profile, device_memory_bytes: int | None, host_memory_bytes: int | None) -> Profile:
    """Return the machine with these memory sizes, soldered or not, for comparisons at equal memory. None keeps a size."""
    device, host = (
        part.model_copy(update={name: None}) for part, name in ((profile.device, "pool_bytes"), (profile.host, "most_bytes"))
    )
    return profile.model_copy(update={"device": device, "host": host}).with_memory(device_memory_bytes, host_memory_bytes)
