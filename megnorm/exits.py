"""Exit codes, of a worker and of a whole run; `megnorm.launcher` says when each one is given."""

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USER_ERROR = 2
EXIT_NO_SPACE = 74
EXIT_STOPPED = 75
EXIT_INTERRUPTED = 130
