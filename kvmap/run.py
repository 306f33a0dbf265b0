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
from pathlib import Path
from typing import Any

from kvmap.config import ConfigError, config_path, register
from kvmap.errors import KvmapError

EXIT_FAILED, EXIT_CONFIG, EXIT_INTERRUPTED = 1, 2, 130


def job(cfg: object) -> None:
    """Run one composed configuration (one job of a sweep).

    Raises:
        ConfigError: naming every mistake in it.
        KvmapError: a stage met bad input.
    """
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    from kvmap.config import Config, unknown_keys, validate

    # omegaconf types both results as anything a node can be; these nodes are a mapping and a Config.
    plain: dict[str, Any] = OmegaConf.to_container(cfg, resolve=False)  # type: ignore[assignment]
    mistakes = [*unknown_keys(plain, Config)]
    mistakes += [f"{key} is not set; set {key}=<value>" for key in sorted(OmegaConf.missing_keys(cfg))]
    if mistakes:
        raise ConfigError(mistakes)
    typed: Config = OmegaConf.to_object(cfg)  # type: ignore[assignment]
    if mistakes := validate(typed):
        raise ConfigError(mistakes)
    from hydra.types import RunMode

    from kvmap.report import write_sweep_summary
    from kvmap.stages import run_stages

    hydra = HydraConfig.get()
    try:
        run_stages(typed, hydra.runtime.output_dir)
    finally:
        if hydra.mode == RunMode.MULTIRUN:
            write_sweep_summary(Path(hydra.sweep.dir))


def _unknown_option(error: Exception) -> str | None:
    """One line for `pair=tinny` and the like: what was asked, the nearest and all that exist."""
    from hydra.errors import MissingConfigException

    if not isinstance(error, MissingConfigException) or not error.missing_cfg_file or not error.options:
        return None
    group, _, name = error.missing_cfg_file.rpartition("/")
    near = difflib.get_close_matches(name, error.options, n=1)
    hint = f" Did you mean {group}={near[0]}?" if near else ""
    return f"unknown {group} {name!r}.{hint} Known: {', '.join(sorted(error.options))}"


def _guarded(action: Callable[[], object]) -> int:
    """Turn every expected failure into one message on stderr and an exit status."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

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
    except KeyboardInterrupt:
        return _complain("interrupted; what was finished is kept and will be reused", EXIT_INTERRUPTED)
    return 0


def _complain(message: str, status: int) -> int:
    print(f"kvmap: {message}", file=sys.stderr)
    return status


def main() -> None:
    """Entry point of `kvmap` and `python -m kvmap.run`."""
    import hydra

    # Hydra otherwise prints a shortened traceback and exits 1 by itself; `_guarded` says it in one line.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    register()
    entry = hydra.main(config_path=config_path(), config_name="config", version_base="1.3")(job)
    sys.exit(_guarded(entry))


if __name__ == "__main__":
    main()
