"""What crosses the wire instead of float32 gradients: fewer bits a value, or fewer values. Lossy, and opt-in.

Each rank keeps what its message left out and adds it to the next one (error feedback: Seide et al. 2014,
Karimireddy et al. 2019, arXiv:1901.09847), so that nothing is lost for good, only late. A sum that is not used leaves
nothing over: what was so before counts until `commit`. All ranks end with the same sums, to the bit, whatever the
number of ranks; unlike processors but for a value in many millions, of powersgd's last product (Factors._multiply).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.distributed as dist

from trainer.clock import Clock
from trainer.sums import Sum, exchange
from trainer.ways import BLOCK
from trainer.world import Circle, World, translated

LEVELS = 127  # of an int8, either side of zero
FACTOR = 2  # by which a matrix must be larger than its two factors as they travel, for powersgd to send those
THINNER = 25  # times fewer bytes than a matrix' gradient its factors have, where nobody says how many columns
MOST_COLUMNS = 64  # that it then has: to make them orthonormal takes as long as their number squared
SHIFT = 1e-8  # beside the square of a column's length, 1: what its root is more than, of a sum of codes, is rounding
EXACT_BITS = 53  # of whole numbers in float64
STACK = 1 << 20  # values of matrices that are inverted at once
ROWS = 4096  # of a product that are computed at once
FACTORS_BLOCK = 256  # of their values that share a scale: they are few, and each rank's part is whole blocks
CODED = 1 + 4 / FACTORS_BLOCK  # bytes of such a value, its part of the scale included


class Code(ABC):
    """How values travel: `encode` to bytes and back, `block` values at a time."""

    block = 1

    @abstractmethod
    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Bytes (uint8, flat) of float32 `values` (flat, a whole number of blocks)."""

    @abstractmethod
    def decode(self, data: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        """`into` (flat, as many), float32: the values that `encode` made `data` of, but for rounding."""


class Bits16(Code):
    """bfloat16: float32's range, 8 bits of its precision."""

    def encode(self, values):
        return values.to(torch.bfloat16).view(torch.uint8)

    def decode(self, data, into):
        return into.copy_(data.view(torch.bfloat16))


class Bits8(Code):
    """int8, by the largest value of each block, whose float32 goes with it."""

    def __init__(self, block: int = BLOCK):
        self.block = block

    def encode(self, values):
        blocks = values.view(-1, self.block)
        scales = blocks.abs().amax(dim=1) / LEVELS
        safe = torch.where(scales > 0, scales, torch.ones_like(scales))
        whole = (blocks / safe[:, None]).round_().to(torch.int8)
        return torch.cat([whole.view(torch.uint8).flatten(), scales.view(torch.uint8)])

    def decode(self, data, into):
        count = len(data) // (self.block + 4)
        whole, scales = data.split([count * self.block, 4 * count])
        numbers = into.view(count, self.block).copy_(whole.view(torch.int8).view(count, self.block))
        numbers *= scales.clone().view(torch.float32)[:, None]
        return into


CODES: dict[str, type[Code]] = {"16bit": Bits16, "8bit": Bits8}


class CodedSum:
    """Sums a flat float32 tensor over all ranks: as it is within a host, by coded messages between hosts.

    A host's first rank has the host's sum. Each of these ranks receives everybody's code of its own part, adds these
    up in the ranks' order, and sends the code of that sum to all: each value is coded twice, whatever the number of
    hosts, and 2(n-1)/n of a coded tensor leaves each of n hosts. `error` (float32, as long as what is summed) is what
    has not travelled yet; of ranks that send nothing to other hosts it stays zero.
    """

    def __init__(self, count: int, code: Code, world: World, circles: tuple[Circle, Circle] | None = None):
        """circles: as `World.circles` gives them; without them each rank is a host of its own."""
        self.count, self.code, self.world = count, code, world
        self.within, self.between = circles or (
            Circle([world.rank], 0, None, world.device),
            Circle(list(range(world.size)), world.rank, world.training, world.device),
        )
        # The same whole number of blocks for every rank; the tail of zeros costs a block at most.
        self.part = -(-count // (self.between.size * code.block)) * code.block
        self.error = torch.zeros(count, device=self.between.device)
        self._next: torch.Tensor | None = None  # the error once the last sum is used
        self.sent = 0  # bytes to other hosts in the last sum; of a host alone, between its ranks
        self.clock = Clock(self.between.device)  # of all that does not send

    def __call__(self, flat: torch.Tensor) -> None:
        """`flat` plus what has not travelled becomes the sum of all ranks' such, in place; all ranks must call.

        Without `commit`, and where the sum is not finite, it is as if nothing had been tried.
        """
        mates, group = self.within.ranks, self.within.group
        self._next = None
        self.sent = 2 * (len(mates) - 1) * 4 * self.count // len(mates) if self.between.size == 1 else 0
        if len(mates) > 1:
            with translated(self.world):
                dist.reduce(flat, mates[0], group=group)
        if self.between.rank is not None and self.between.size > 1:
            self._sum_between(flat)
        elif self.between.rank is not None:
            with self.clock:
                self._add_error(flat)
        if len(mates) > 1:
            with translated(self.world):
                dist.broadcast(flat, mates[0], group=group)

    def commit(self) -> None:
        """The last sum is used, so that the next one is to have what this one left out."""
        if self._next is not None:
            self.error, self._next = self._next, None

    @property
    def left_out(self) -> torch.Tensor:
        """What of this rank's part the last sum does not have; zeros where it sends nothing, or nothing was finite."""
        return torch.zeros_like(self.error) if self._next is None else self._next

    def _add_error(self, flat: torch.Tensor) -> None:
        """There is no other host: what an attempt with others has left over is all that is to be added."""
        flat += self.error
        if finite(flat):
            self._next = torch.zeros_like(self.error)

    def _sum_between(self, flat: torch.Tensor) -> None:
        """`flat` plus the error becomes the sum over hosts."""
        size, part, rank, group = self.between.size, self.part, self.between.rank, self.between.group
        with translated(self.world):
            with self.clock:
                padded = torch.empty(size * part, device=flat.device)
                torch.add(flat, self.error, out=padded[: self.count])
                padded[self.count :] = 0
                codes = torch.stack([self.code.encode(one) for one in padded.view(size, part)])
                came = torch.empty_like(codes)
            exchange(came, codes, group)
            with self.clock:
                total, decoded = torch.zeros(part, device=flat.device), torch.empty(part, device=flat.device)
                for one in came:
                    total += self.code.decode(one, decoded)
                mine = self.code.encode(total)
                everyone = torch.empty(size * len(mine), dtype=torch.uint8, device=flat.device)
            dist.all_gather_into_tensor(everyone, mine, group=group)
        self.sent = 2 * (size - 1) * codes.shape[1]
        with self.clock:
            for left, one in zip(padded.view(size, part), codes, strict=True):
                left -= self.code.decode(one, decoded)
            padded[rank * part : (rank + 1) * part] += total - self.code.decode(mine, decoded)
            # The last parts may be of the tail alone.
            for place, one in zip(flat.split(part), everyone.view(size, -1), strict=False):
                place.copy_(self.code.decode(one, decoded)[: len(place)])
            if finite(flat):
                self._next = padded[: self.count]


def finite(values: torch.Tensor) -> bool:
    """Whether all of them are. A sum that is says so; to look at each takes twenty times as long on a CPU."""
    return bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all())


def folded(shape: torch.Size | tuple[int, ...]) -> tuple[int, int]:
    """(rows, columns) of the matrix that is made of a gradient of this shape: a stack of experts stands on each other.

    So they share the columns of their inputs, and not their whole matrices.
    """
    return math.prod(shape[:-1]), shape[-1]


def columns(shape: torch.Size | tuple[int, ...], rank: int) -> int:
    """How many columns the two factors of a gradient of this shape have; 0 where it goes whole: no matrix, or no gain.

    rank: as many; 0: as many as leave a THINNERth of its bytes, MOST_COLUMNS at most.
    """
    if len(shape) < 2:
        return 0
    rows, width = folded(shape)
    share = round(4 * rows * width / (THINNER * CODED * (rows + width)))
    found = min(rank or min(max(1, share), MOST_COLUMNS), rows, width)
    return found if FACTOR * CODED * found * (rows + width) < 4 * rows * width else 0


def factor_bytes(parameters: list[torch.Tensor], rank: int) -> int:
    """Bytes of the gradients of `parameters` as powersgd sends them: factors in 8 bits, what goes whole in float32."""
    found = 0.0
    for one in parameters:
        count = columns(one.shape, rank)
        found += CODED * count * sum(folded(one.shape)) if count else 4 * one.numel()
    return int(found)


def orthonormal(matrices: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of each matrix (rows, columns; as many rows at least) what its columns span, by orthonormal ones.

    By Cholesky's factor of its columns' products (shifted CholeskyQR: Fukaya et al. 2020, arXiv:1809.11085). What a
    column has of its own, beside those before it, comes out shorter than 1 where SHIFT is not little beside its
    square, and of nothing comes nothing.

    The same bits come of the same ones on any processor, for sums, whose order is a library's, are of whole numbers,
    and exact. LAPACK's and cuSOLVER's QR differ by processor and threads, of columns that nearly depend on each other
    not in the last bits alone, and what ranks have multiplied by unlike columns cannot be summed.
    """
    found, alike = list(matrices), {}
    for number, one in enumerate(matrices):
        alike.setdefault(one.shape[1], []).append(number)
    for width, numbers in alike.items():
        at_once = max(1, STACK // width**2)
        for begin in range(0, len(numbers), at_once):
            some = numbers[begin : begin + at_once]
            # Twice, for there may be no room for all of them.
            wholes = (_whole_rows(matrices[number])[0] for number in some)
            for number, own in zip(some, _weights([one.T @ one for one in wholes]), strict=True):
                whole, bits = _whole_rows(matrices[number])
                own, unit = _whole(own, EXACT_BITS - bits - (width - 1).bit_length())
                found[number] = (whole @ own * unit).float()
    return found


def _whole_rows(matrix: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The matrix by columns as whole numbers, whose products float64 sums up without rounding; and of how many bits."""
    bits = (EXACT_BITS - (len(matrix) - 1).bit_length()) // 2
    return _whole(matrix.double(), bits)[0], bits


def _whole(values: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(whole numbers of at most 2 ** bits, the power of two by which those of a column make its values)."""
    largest = values.abs().amax(dim=0)
    power = torch.where(largest > 0, largest / torch.frexp(largest).mantissa, torch.ones_like(largest))
    unit = power / 2.0**bits
    return (values / unit).round_(), unit


def _weights(products: list[torch.Tensor]) -> torch.Tensor:
    """By which columns that have these products (columns, columns; whole numbers) become orthonormal, one a column.

    That is the inverse of Cholesky's factor of the products and SHIFT, by elimination of single values, of which the
    same bits come anywhere: columns are made about as long as each other by powers of two, and the root, which not all
    libraries round alike, comes last, where its last bit is one of a column's length.
    """
    stack = torch.stack(products)
    _, exponents = torch.frexp(stack.diagonal(dim1=1, dim2=2))  # of squares
    lengths = (torch.ones_like(exponents) << (exponents + 1 >> 1).clamp(0, EXACT_BITS // 2 + 1)).double()
    one = torch.eye(stack.shape[1], dtype=stack.dtype, device=stack.device)
    both = torch.cat(
        [stack / lengths[:, :, None] / lengths[:, None, :] + SHIFT * one, one.expand_as(stack)], dim=2
    )
    width = len(one)
    for k in range(width):
        row, times = both[:, k], both[:, k, k + 1 : width] / both[:, k, k, None]
        both[:, k + 1 :] -= times[:, :, None] * row[:, None, :]
    inverses = both[:, :, width:] / both.diagonal(dim1=1, dim2=2).sqrt()[:, :, None]
    return inverses.mT / lengths[:, :, None]


class Factors:
    """Sums gradients by the product of two thin matrices (PowerSGD: Vogels et al. 2019, arXiv:1905.13727).

    One power iteration a step, from where the last one ended. The factors travel in 8 bits, so that there may be four
    times as many columns: of the first one nothing is lost by that, since any columns will do as long as all have the
    same ones, and what the second one's code leaves out is left over as what is not in these columns. What is no
    matrix, or too small to gain, goes whole.
    """

    def __init__(
        self,
        gradients: list[torch.Tensor],
        rank: int,
        world: World,
        total: Sum | None = None,
        circles: tuple[Circle, Circle] | None = None,
    ):
        """rank: of the factors (see `columns`). total: what sums the rest; without it all ranks go one by one.
        circles: as CodedSum has them.
        """
        self.world, self._total = world, total or Sum(world, None)
        # Processors of a kind may be of two makers, and have products of their own.
        self._alike = world.alike and world.device.type != "cpu"
        counts = [columns(one.shape, rank) for one in gradients]
        self.split = list(map(bool, counts))
        self.shapes = [folded(one.shape) for one, count in zip(gradients, counts, strict=True) if count]
        counts = list(filter(None, counts))
        generator = torch.Generator().manual_seed(1)  # the same on all ranks
        self.right = [
            torch.randn(width, count, generator=generator).to(world.device)
            for (_, width), count in zip(self.shapes, counts, strict=True)
        ]
        self.errors = [torch.zeros(shape, device=world.device) for shape in self.shapes]
        self._next: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None  # errors and right
        self._coded = [
            CodedSum(
                sum(shape[side] * count for shape, count in zip(self.shapes, counts, strict=True)),
                Bits8(FACTORS_BLOCK),
                world,
                circles,
            )
            for side in (0, 1)
        ]
        self.sent = 0
        self._clock = Clock(world.device)

    def __call__(self, gradients: list[torch.Tensor]) -> None:
        """Each gradient, with what has not travelled, becomes all ranks' sum, in place; all ranks must call.

        Without `commit`, and where the sum is not finite, it is as if nothing had been tried.
        """
        split = [one for one, is_split in zip(gradients, self.split, strict=True) if is_split]
        rest = [one for one, is_split in zip(gradients, self.split, strict=True) if not is_split]
        first, second = self._coded
        with self._clock:
            matrices = [
                one.reshape(shape) + error
                for one, shape, error in zip(split, self.shapes, self.errors, strict=True)
            ]
            starts = [m @ q for m, q in zip(matrices, self.right, strict=True)]
        came = _summed(first, starts)
        with self._clock:
            left = orthonormal(came)
            own = [m.T @ p for m, p in zip(matrices, left, strict=True)]
        right = _summed(second, own)
        whole = _summed(self._exactly, rest)
        with self._clock:
            lost = _like(own, second.left_out)
            finite = bool(torch.stack([torch.isfinite(one).all() for one in (*right, *whole)]).all())
            for one, p, q in zip(split, left, right, strict=True):
                self._multiply(p, q, one.view(len(p), len(q))) if finite else one.fill_(float("nan"))
            for one, total in zip(rest, whole, strict=True):
                one.copy_(total)
            for m, p, q, e in zip(matrices, left, own, lost, strict=True):
                m -= p @ (q - e).T  # what is left over; in place, where there may be no room for another copy
            self._next = (matrices, _again(right)) if finite else None
        self.sent = first.sent + second.sent + self._total.sent(4 * sum(one.numel() for one in rest))

    def seconds(self) -> float:
        """As Clock.take, of all that does not send."""
        return sum(clock.take() for clock in (self._clock, *(one.clock for one in self._coded)))

    def commit(self) -> None:
        """The last sum is used: the next one is to have what this one left out, and to go on from its columns."""
        if self._next is not None:
            (self.errors, self.right), self._next = self._next, None

    def _multiply(self, left: torch.Tensor, right: torch.Tensor, into: torch.Tensor) -> None:
        """`into` becomes the sum of the columns' products, of which all ranks are to have the same bits.

        Where ranks may add up in another order, in float64, whose last bits hardly ever tell in float32. In float32 a
        value that is little beside what adds up to it differs by more than its own last bits, and of a step by AdamW,
        which goes as far for a small gradient as for a large one, so does a weight.
        """
        right = right if self._alike else right.double()
        for rows, place in zip(left.split(ROWS), into.split(ROWS), strict=True):
            place.copy_(rows.to(right.dtype) @ right.T)

    def _exactly(self, flat: torch.Tensor) -> None:
        with translated(self.world):
            self._total(flat)


def _again(right: list[torch.Tensor]) -> list[torch.Tensor]:
    """The columns with which the next step begins: as long as each other, so that a block's code leaves none of them
    out, and drawn anew where nothing of one is left, which would else stay so.
    """
    largest = [one.abs().amax(dim=0) for one in right]
    if not right or bool(torch.stack([one.min() for one in largest]).min()):
        return [one / most for one, most in zip(right, largest, strict=True)]
    drawn = torch.Generator().manual_seed(2)
    return [
        torch.where(most > 0, one / most, torch.randn(one.shape, generator=drawn).to(one))
        for one, most in zip(right, largest, strict=True)
    ]


def _summed(total: Callable[[torch.Tensor], None], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """All ranks' sums by `total`, in one go."""
    if not tensors:
        return []
    flat = torch.cat([one.flatten() for one in tensors])
    total(flat)
    return _like(tensors, flat)


def _like(tensors: list[torch.Tensor], flat: torch.Tensor) -> list[torch.Tensor]:
    """Views of `flat`, shaped like `tensors`."""
    parts = flat.split([one.numel() for one in tensors])
    return [part.view(one.shape) for part, one in zip(parts, tensors, strict=True)]
