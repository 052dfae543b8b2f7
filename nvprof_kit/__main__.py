"""``python -m nvprof_kit`` is ``nvprof-kit``."""

from nvprof_kit._cli import main

if __name__ == "__main__":
    main()
