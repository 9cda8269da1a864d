"""By which ways gradients can travel under ddp: how much each sends, what it costs, and when one is worth that.

No torch here.
"""

USED = 0.94  # of a link's bits: what is left beside the headers of Ethernet and TCP
BUCKET_BYTES = 25 << 20  # of gradients that travel together, and a little more
SLOW = 0.5  # of the time to compute, which sending may take before another way is worth its price
BLOCK = 1024  # values of `8bit` that share a scale of 4 bytes
PRICE = {
    "16bit": "next to none",
    "8bit": "the curve moves a little",
    "powersgd": "the curve moves; matrices only",
    "diloco": "another curve: the loss after as many tokens is a little higher, or needs more of them",
}
EXACT = (
    "auto",
    "exact",
)  # values of the key comm with which nothing is lost; auto proposes another where that pays


def sent(gradients: int, factors: int, ranks: int, sync_every: int) -> dict[str, int]:
    """Bytes that a rank sends in a step, on average, by way (trainer/compress.py).

    gradients: bytes of all of them, float32; factors: as powersgd sends them.
    """
    exact = 2 * gradients * (ranks - 1) // ranks
    eighth = int(exact * (BLOCK + 4) / (4 * BLOCK))
    return {
        "exact": exact,
        "16bit": exact // 2,
        "8bit": eighth,
        "powersgd": 2 * factors * (ranks - 1) // ranks,
        "diloco": eighth // sync_every,
    }


def proposal(parts: dict, by_way: dict[str, int]) -> str | None:
    """What to say of exact steps whose time went as `parts` tells (trainer/metrics.py); None where they are as they
    should be. by_way: as `sent` gives it.
    """
    compute = parts["compute"][0] + parts["waiting"][0] + parts["rest"]
    wire = parts["wire"]
    if wire <= SLOW * compute:
        return None
    takes = {way: wire * by_way[way] / by_way["exact"] for way in PRICE}
    way = next((way for way, seconds in takes.items() if seconds <= SLOW * compute), "diloco")
    step = compute + wire
    return (
        f"the network takes {wire / step:.0%} of a step ({wire:.2g} of {step:.2g} s). A larger batch_size makes that "
        f"less at no price; comm: {way} sends {by_way[way] / by_way['exact']:.1%} of the bytes, for steps "
        f"{step / (compute + takes[way]):.1f} times as fast. Its price: {PRICE[way]}. "
        f"A run goes on with it after stop.yml, by -e resume=true -e comm={way} (docs/slow-networks.md)"
    )
