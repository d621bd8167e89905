"""What the command-line tools share: one message for a user's error, and its exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn

from megnorm.data.errors import DataError

USER_ERROR = 2
FAILURE = 1
INTERRUPTED = 130


class ToolFailure(Exception):
    """The work could not be finished, through no fault of the user's; one line."""


def run_tool(main: Callable[[], int]) -> NoReturn:
    """Runs `main` and exits: 2 and one message for a user's error, 1 for a failure, 130 on Ctrl-C."""
    try:
        code = main()
    except DataError as error:
        code = _say(error, USER_ERROR)
    except ToolFailure as error:
        code = _say(error, FAILURE)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        code = _say(f"{where}{error.strerror or error}", FAILURE)
    except KeyboardInterrupt:
        code = _say("interrupted; nothing stands under the final names", INTERRUPTED)
    sys.exit(code)


def _say(message: object, code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code
