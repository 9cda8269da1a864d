"""What can end a run, and the exit code that says so. Imported by the controller too: no torch here."""


class TrainerError(Exception):
    """A fault with a message that a user can act on; shown without a traceback."""

    code = 1
    of_all = False  # whether all ranks have it, of which one had it first (World.agree)


class BadInput(TrainerError):
    """The configuration, the data, the model or the machine is not as it must be. Nothing was started."""

    code = 2


class Diverged(TrainerError):
    """The loss or the gradient is no longer a finite number."""

    code = 3


class OutOfMemory(TrainerError):
    """A rank's accelerator or host memory was not enough."""

    code = 4


class LostPeers(TrainerError):
    """Another rank went away, or did not answer in time."""

    code = 5


class Stopped(TrainerError):
    """The run was asked to stop; it saved and can be resumed."""

    code = 75


KINDS = {kind.code: kind for kind in (TrainerError, BadInput, Diverged, OutOfMemory, LostPeers, Stopped)}
