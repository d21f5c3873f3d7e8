"""The probe: whether this machine has the device. It runs in every process, before torch is imported, so it should be quick."""

from quire import envs
from quire.plugins.vendor import VARIABLES, Variable

VARIABLES.register("OAK_DEVICES", Variable(0, "How many Oak devices this machine has.", int))


def find() -> str | None:
    """The class path of the platform; None: it cannot run here."""
    return "quire_oak.platform:OakPlatform" if envs.OAK_DEVICES else None
