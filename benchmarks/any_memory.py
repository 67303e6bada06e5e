"""Profiles with sizes of memory that are not sold for their machine."""

from penstock.hwprofiles.schema import Profile


def with_any_memory(profile: Profile, device_memory_bytes: int | None, host_memory_bytes: int | None) -> Profile:
    """The machine as if it had so much memory, soldered or not; None leaves a size as it is. For comparisons at equal memory."""
    device, host = (
        part.model_copy(update={name: None}) for part, name in ((profile.device, "pool_bytes"), (profile.host, "most_bytes"))
    )
    return profile.model_copy(update={"device": device, "host": host}).with_memory(device_memory_bytes, host_memory_bytes)
