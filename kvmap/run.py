"""The command line: compose a configuration, judge it, run its stages, print where the results lie.

    python -m kvmap.run [group=option] [key=value] [-m key=a,b,c]

Exit status: 0 all stages done; 1 a stage failed; 2 the configuration is wrong; 130 interrupted.
"""

from __future__ import annotations

import difflib
import errno
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

from kvmap.config import Config, ConfigError, config_path, register, unknown_keys, validate
from kvmap.errors import KvmapError
from kvmap.sweeps.points import register_resolver

EXIT_FAILED, EXIT_CONFIG, EXIT_INTERRUPTED = 1, 2, 130

# Here and not in `main`: a process that a launcher starts for a job loads this module, and calls `job` only.
register()
register_resolver()


def job(cfg: object) -> None:
    """Run one composed configuration (one job of a sweep).

    A job of a sweep whose point is done, or runs elsewhere, says so and does nothing; one whose point was
    left unfinished goes on in the directory where that lies.

    Raises:
        ConfigError: naming every mistake in it.
        KvmapError: a stage met bad input; or what was submitted has changed meanwhile.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from kvmap.sweeps.isolation import isolated

    hydra = HydraConfig.get()
    if hydra.mode == RunMode.MULTIRUN and hydra.launcher._target_.endswith(".JoblibLauncher"):
        isolated(lambda: _run(cfg))  # joblib's processes run one job after the other
    else:
        _run(cfg)


def _run(cfg: object) -> None:
    """Run the job in this process, if it is its turn."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from kvmap.preemption import watched
    from kvmap.stages import run_stages
    from kvmap.sweeps.failures import crossing
    from kvmap.sweeps.identity import job_identity
    from kvmap.sweeps.job import refusal_recorded, say, turn_of
    from kvmap.sweeps.points import plain_config
    from kvmap.sweeps.submission import check_submission

    hydra = HydraConfig.get()
    own, in_sweep = Path(hydra.runtime.output_dir), hydra.mode == RunMode.MULTIRUN
    with watched(hydra.launcher.get("signal_delay_s", 0)), ExitStack() as stack:
        with refusal_recorded(own) if in_sweep else nullcontext():
            typed = judged(cfg)
            identity = job_identity(plain_config(cfg))
            if in_sweep:
                allowed = typed.sweep.allow_changed_code
                check_submission(Path(hydra.sweep.dir), hydra.job.num, identity, allow_changed_code=allowed)
            turn = stack.enter_context(turn_of(typed, identity, own, in_sweep=in_sweep))
        say(turn, identity, own)
        if turn.runs and turn.directory is not None:
            with crossing(turn.directory) if in_sweep else nullcontext():
                run_stages(typed, turn.directory, identity=identity)


def judged(cfg: object) -> Config:
    """The typed configuration.

    Raises:
        ConfigError: naming every mistake in it.
    """
    from omegaconf import OmegaConf

    # omegaconf types both results as anything a node can be; these nodes are a mapping and a Config.
    plain: dict[str, Any] = OmegaConf.to_container(cfg, resolve=False)  # type: ignore[assignment]
    mistakes = [*unknown_keys(plain, Config)]
    mistakes += [f"{key} is not set; set {key}=<value>" for key in sorted(OmegaConf.missing_keys(cfg))]
    if mistakes:
        raise ConfigError(mistakes)
    typed: Config = OmegaConf.to_object(cfg)  # type: ignore[assignment]
    if mistakes := validate(typed):
        raise ConfigError(mistakes)
    return typed


def _unknown_option(error: Exception) -> str | None:
    """One line for `pair=tinny` and the like: what was asked, the nearest and all that exist."""
    from hydra.errors import MissingConfigException

    if not isinstance(error, MissingConfigException) or not error.missing_cfg_file or not error.options:
        return None
    group, _, name = error.missing_cfg_file.rpartition("/")
    near = difflib.get_close_matches(name, error.options, n=1)
    hint = f" Did you mean {group}={near[0]}?" if near else ""
    return f"unknown {group} {name!r}.{hint} Known: {', '.join(sorted(error.options))}"


def guarded(action: Callable[[], object]) -> int:
    """Turn every expected failure into one message on stderr and an exit status."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from kvmap.sweeps.failures import launcher_failure

    try:
        action()
    except ConfigError as error:
        return _complain(str(error), EXIT_CONFIG)
    except KvmapError as error:
        return _complain(str(error), EXIT_FAILED)
    except (HydraException, OmegaConfBaseException) as error:
        cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else None
        text = _unknown_option(error) or " ".join(f"{error} {cause or ''}".split())
        return _complain(
            f"configuration: {text} (python -m kvmap.run --help lists groups and options)", EXIT_CONFIG
        )
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, type(error).__name__)
        return _complain(
            f"{name}: {error.strerror or error} ({error.filename}). Results go to `outputs`; "
            "set outputs=<folder on a disk that is writable and has room> or KVMAP_OUTPUTS",
            EXIT_FAILED,
        )
    except Exception as error:
        if (said := launcher_failure(error)) is None:
            raise
        return _complain(said, EXIT_FAILED)
    except KeyboardInterrupt:
        return _complain("interrupted; what was finished is kept and will be reused", EXIT_INTERRUPTED)
    return 0


def _complain(message: str, status: int) -> int:
    print(f"kvmap: {message}", file=sys.stderr)
    return status


def main() -> None:
    """Entry point of `kvmap` and `python -m kvmap.run`."""
    import hydra

    # By its name, for which a job's own process can look; what belongs to __main__ would be sent there whole.
    from kvmap.run import job

    # Hydra otherwise prints a shortened traceback and exits 1 by itself; `guarded` says it in one line.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    entry = hydra.main(config_path=config_path(), config_name="config", version_base="1.3")(job)
    sys.exit(guarded(entry))


if __name__ == "__main__":
    main()
