"""The division of an update's images among processes and micro-batches."""

from dataclasses import dataclass

from ..core.errors import LabError
from ..core.words import counted


@dataclass(frozen=True)
class BatchLayout:
    """Sizes of micro-batch, update and process group, and the rank of this process."""

    micro_batch: int  # images per process and forward pass
    accumulation: int = 1  # forward passes per update
    num_processes: int = 1
    rank: int = 0

    @property
    def global_batch(self) -> int:
        """Images per update, over all processes and micro-batches."""
        return self.micro_batch * self.accumulation * self.num_processes

    def positions(self) -> list[range]:
        """Positions of this process in the global batch, one range per micro-batch."""
        starts = [(step * self.num_processes + self.rank) * self.micro_batch for step in range(self.accumulation)]
        return [range(start, start + self.micro_batch) for start in starts]

    def image_numbers(self, update: int) -> list[int]:
        """The image numbers in the run that this process sees in an update."""
        first = update * self.global_batch
        return [first + position for positions in self.positions() for position in positions]

    def check_fits(self, num_images: int) -> None:
        """Raises a `LabError` if an update needs more images than there are."""
        if self.global_batch <= num_images:
            return
        largest = num_images // (self.accumulation * self.num_processes)
        raise LabError(
            f"The batch of {counted(self.global_batch, 'image')} (--train_batch_size {self.micro_batch} x "
            f"{counted(self.accumulation, 'micro-batch')} x {counted(self.num_processes, 'process')}) is larger than the "
            f"training set of {num_images}. "
            + (f"Use at most --train_batch_size {largest}." if largest else "Use fewer --gradient_accumulation_steps.")
        )
