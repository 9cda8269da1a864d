"""`trainer launch`: this host's ranks, started and watched by torchrun's agent, members and ranks given.

The agent runs in a thread, so that this one can always answer a signal. A stop becomes the stop file: the
ranks agree, save and end with 75. However the ranks end, status.json has the last word, with the reason.
"""

import contextlib
import errno
import json
import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path

from trainer import metrics
from trainer.config import Config
from trainer.environment import Environment, number
from trainer.errors import BadInput

MARKS = ("error: ", "stopped: ")
MEETING_PLACE = "trainyard"
MEETING = {"DistError", "RendezvousError", "TimeoutError"}  # what torch raises where hosts do not meet


def main(config: Config, environment: Environment, arguments: list) -> int:
    """Run this host's ranks to their end; returns the exit code of the rank that failed first, or 0."""
    nodes, node, ranks = number("NNODES", 1), number("NODE_RANK", 0), number("NPROC_PER_NODE", 1)
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), number("MASTER_PORT", 29500)
    run_dir = environment.run_dir
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    if node == 0:
        _check_port(address, port)
    environment.stop_file.unlink(missing_ok=True)
    attempt = _attempts(run_dir) + 1
    os.environ.update(
        TRAINYARD_RUN_DIR=str(run_dir),
        TRAINYARD_CACHE_DIR=str(environment.cache_dir),
        TRAINYARD_ATTEMPT=str(attempt),
        TRAINYARD_LAUNCHER=str(os.getpid()),
    )
    os.environ.setdefault(
        "OMP_NUM_THREADS", str(config.threads or max(1, len(os.sched_getaffinity(0)) // ranks))
    )
    world_size = number("WORLD_SIZE", ranks * nodes)
    status = metrics.Status(
        run_dir, run=config.run, attempt=attempt, world_size=world_size, host=environment.host
    )
    status.update(
        state="starting", reason=f"waiting for {nodes} hosts at {address}:{port}" if nodes > 1 else None
    )

    outcome: dict = {}
    stopping = threading.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: stopping.set())
    agent = threading.Thread(
        target=_agent, args=(outcome, config, arguments, nodes, node, ranks, address, port), daemon=True
    )
    agent.start()
    asked = False
    while agent.is_alive():
        agent.join(0.2)
        if not asked and (stopping.is_set() or environment.stop_file.exists()):
            asked = True
            environment.stop_file.touch()
            if not any(_started(run_dir, rank, attempt) for rank in range(world_size)):
                outcome.update(code=75, reason="stopped on request before the hosts had met")
                break
    environment.stop_file.unlink(missing_ok=True)
    code = _conclude(run_dir, outcome, asked, environment.host, status)
    if agent.is_alive():  # in torch's own wait, which nothing interrupts
        sys.stderr.flush()
        os._exit(code)
    return code


def _agent(outcome: dict, config: Config, arguments: list, nodes, node, ranks, address, port) -> None:
    """Run torchrun's agent; leaves code and reason in `outcome`."""
    try:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
        rendezvous_handler_registry.register(MEETING_PLACE, _meeting_place)
        launch = LaunchConfig(
            min_nodes=nodes,
            max_nodes=nodes,
            nproc_per_node=ranks,
            run_id=config.run,
            rdzv_backend=MEETING_PLACE,
            rdzv_endpoint=f"{address}:{port}",
            rdzv_configs={"rank": node, "timeout": int(config.timeout_seconds)},
            local_addr=os.environ.get("CLUSTER_ADDRESS") or None,
            max_restarts=0,
            monitor_interval=0.2,
            logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # each rank writes its own: commands/train.py
            signals_to_handle="SIGQUIT",  # SIGTERM and SIGINT are ours
        )
        try:
            elastic_launch(launch, sys.executable)("-m", "trainer", "train", *map(str, arguments))
            outcome.update(code=0, reason=None)
        except ChildFailedError as error:
            outcome["failures"] = {
                rank: failure.exitcode
                for rank, failure in sorted(error.failures.items(), key=lambda f: f[1].timestamp)
            }
    except Exception as error:
        lines = str(error).strip().splitlines()
        said = lines[0] if lines else type(error).__name__
        if MEETING & {kind.__name__ for kind in type(error).__mro__}:
            waited = f"the hosts did not meet at {address}:{port} within {config.timeout_seconds:.0f} s"
            cure = "check that the run was started on all, that MASTER_ADDR is the head's address, and the firewall"
            outcome.update(code=5, reason=f"{waited}: {said}; {cure}")
        else:
            cure = "if this names a library or a module, the environment is damaged: run site.yml, which tests it"
            outcome.update(
                code=1, reason=f"the ranks could not be started: {type(error).__name__}: {said}; {cure}"
            )


def _meeting_place(parameters):
    """torch's static rendezvous, whose store listens on the head's own address alone instead of on every one."""
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous import static_tcp_rendezvous

    handler = static_tcp_rendezvous.create_rdzv_handler(parameters)
    handler.get_backend = lambda: MEETING_PLACE
    if handler.rank == 0:
        place = (handler.master_addr, handler.master_port)
        family = socket.getaddrinfo(*place, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server(place, family=family)
        handler._store = TCPStore(
            *place,
            handler.world_size,
            True,
            handler.timeout,
            multi_tenant=True,
            master_listen_fd=listener.detach(),
        )
    return handler


def _conclude(run_dir: Path, outcome: dict, asked: bool, host: str, status: metrics.Status) -> int:
    """Write the final status.json; returns the exit code. `asked`: this launcher was told to stop."""
    code, reason = outcome.get("code", 1), outcome.get("reason", "torchrun's agent ended without a word")
    if "failures" in outcome:
        rank, code = _root_cause(outcome["failures"])
        tail = _last_words(run_dir / "logs" / f"rank-{rank}.log")
        if asked and code in (-signal.SIGTERM, 5):
            code = 75
            reason = "stopped on request before the ranks could save; they go on from the last checkpoint"
        elif code < 0:
            name = signal.Signals(-code).name
            hint = (
                "; the kernel does so when memory runs out: see `journalctl -k`" if name == "SIGKILL" else ""
            )
            reason = f"rank {rank} on {host} was killed by {name}{hint}. Its last lines: {tail}"
            code = 1
        else:
            reason = tail or f"rank {rank} on {host} ended with exit code {code} and without a word"
    state = {0: "finished", 75: "stopped"}.get(code, "failed")
    try:
        known = json.loads((run_dir / "status.json").read_text())
    except (OSError, ValueError):
        known = {}
    # The first rank may have seen only that it lost a peer; the rank that failed first knows why.
    status.facts.update({**known, "attempt": status.facts["attempt"]})
    status.facts["state"] = None
    if code:
        with contextlib.suppress(OSError):
            print(f"{state}: {reason}", file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):  # a full disk must not take the reason with it
        status.update(state=state, reason=reason)
    return code


def _root_cause(failures: dict[int, int]) -> tuple[int, int]:
    """The rank that failed first and its code: whoever lost a peer, or was ended by the agent, came later."""
    own = {rank: code for rank, code in failures.items() if code not in (5, -signal.SIGTERM)}
    return next(iter((own or failures).items()))


def _last_words(path: Path) -> str:
    """What a rank's log ends with: its `error:` message, or its last lines."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return ""
    attempt = text[max(text.rfind("\n=== "), 0) :].strip()
    for mark in MARKS:
        at = attempt.rfind(f"\n{mark}")
        if at >= 0:
            return attempt[at + 1 + len(mark) :].strip()
    return "\n".join(attempt.splitlines()[-5:])


def _check_port(address: str, port: int) -> None:
    if not 1 <= port <= 65535:
        raise BadInput(f"MASTER_PORT {port} is no port; choose one from 1024 to 65535")
    try:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        socket.create_server((address, port), family=family).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise BadInput(
                f"MASTER_PORT {port} is in use on this host, by an active run or another program "
                f"(`ss -ltnp 'sport = :{port}'` names it); stop that, or choose another port"
            ) from None
        if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
            raise BadInput(
                f"MASTER_ADDR {address} is no address of this host, which is the head (NODE_RANK 0); correct it"
            ) from None
        raise BadInput(
            f"MASTER_PORT {port} cannot be used: {error.strerror}; choose one from 1024 to 65535"
        ) from None


def _attempts(run_dir: Path) -> int:
    try:
        return int(json.loads((run_dir / "status.json").read_text())["attempt"] or 0)
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _started(run_dir: Path, rank: int, attempt: int) -> bool:
    try:
        return f"attempt {attempt}, rank {rank} " in (run_dir / "logs" / f"rank-{rank}.log").read_text(
            errors="replace"
        )
    except OSError:
        return False
