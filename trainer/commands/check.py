"""`trainer check`: configuration, data and model validated; nothing trained."""

from trainer.config import Config
from trainer.data import read
from trainer.environment import Environment
from trainer.errors import BadInput


def main(config: Config, environment: Environment, config_only: bool) -> int:
    """Print what was found; raises BadInput that lists every problem at once.

    `config_only` needs no torch.
    """
    if config_only:
        print(f"configuration of run '{config.run}': good")
        return 0
    problems, samples, letters = [], 0, 0
    try:
        samples, letters = read.check(config)
    except BadInput as error:
        problems.append(str(error))

    from trainer.model import load
    from trainer.world import World

    world = World(config, environment)
    if not (problems and config.model == "tiny"):  # its tokenizer needs the data
        try:
            load.source(config, world)
        except BadInput as error:
            problems.append(str(error))
    if problems:
        raise BadInput("\n".join(problems))
    print(
        f"run '{config.run}': configuration, data ({samples:,} samples, {letters:,} characters) and model are good"
    )
    return 0
