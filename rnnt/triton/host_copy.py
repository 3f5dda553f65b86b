"""Values on their way from the device to the host, which goes on meanwhile."""

import torch
from torch import Tensor


class HostCopy:
    """host: a copy of the tensor, to be read once it has arrived."""

    def __init__(self, x: Tensor) -> None:
        self.event: torch.cuda.Event | None = None
        self.host = x
        if x.is_cuda:
            self.host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            self.host.copy_(x, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()

    def has_arrived(self) -> bool:
        return self.event is None or self.event.query()

    def arrived(self) -> Tensor:
        """The copy; waits for it."""
        if self.event is not None:
            self.event.synchronize()
        return self.host
