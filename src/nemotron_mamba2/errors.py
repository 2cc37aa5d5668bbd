"""Every error that this package raises on purpose.

    NemotronMamba2Error
    ├── ConfigError        config.json describes nothing we run
    ├── CheckpointError    missing, unread or contradictory tensors and files
    ├── FormatError        a weight's dtype, shape or scales are not what its format says
    ├── NoKernel           nothing serves this op × format × device (load time only)
    ├── ShapeError         tensors of a call do not fit together
    ├── StateError         a slot is not in the state that a call needs
    │   └── SnapshotMismatch   other model, other layout, part missing
    ├── CapacityError
    │   ├── OutOfSlots
    │   └── OutOfPages
    ├── AdapterError       a foreign model, or a use of it, that an adapter does not serve
    └── RequestError       the user's request is at fault (HTTP 400)

A message names the thing, what was expected, what came, and a way out. Catch the root to catch all;
catch a leaf to recover from that one thing.
"""


class NemotronMamba2Error(Exception):
    """Root of every error that this package raises on purpose."""


class ConfigError(NemotronMamba2Error):
    """config.json, or a setting of ours, describes nothing that we run."""


class CheckpointError(NemotronMamba2Error):
    """Files or tensors of a checkpoint are missing, unread or contradictory."""


class FormatError(NemotronMamba2Error):
    """A weight's dtype, shape or scales are not what its format says."""


class NoKernel(NemotronMamba2Error):
    """Nothing serves this op × format × device. Raised while planning, never at the first token."""


class ShapeError(NemotronMamba2Error):
    """Tensors of one call do not fit together."""


class StateError(NemotronMamba2Error):
    """A slot is free, poisoned, or holds uncommitted rows where the call needs it otherwise."""


class SnapshotMismatch(StateError):
    """A snapshot was taken from another model or layout, or a part of it is missing."""


class CapacityError(NemotronMamba2Error):
    """A pool has no room for what was asked."""


class OutOfSlots(CapacityError):
    """No state slot is free."""


class OutOfPages(CapacityError):
    """No KV page is free."""


class AdapterError(NemotronMamba2Error):
    """A model of another library, or a use of it, that its adapter does not serve."""


class RequestError(NemotronMamba2Error):
    """The user's request is at fault: bad sampling values, an empty or over-long prompt."""
