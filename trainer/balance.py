"""Who does how much of a step."""

from trainer.errors import BadInput


def shares(batch_size: int, world_size: int) -> list[int]:
    """How many of a step's sequences each rank computes: equal shares, the remainder to the first ranks.

    Raises BadInput where a rank would have nothing to do.
    """
    if batch_size < world_size:
        raise BadInput(
            f"batch_size {batch_size} is less than the {world_size} ranks, so that some would have no work; "
            f"set batch_size to {world_size} or more, or use fewer processes"
        )
    whole, rest = divmod(batch_size, world_size)
    return [whole + (rank < rest) for rank in range(world_size)]
