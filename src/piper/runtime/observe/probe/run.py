"""Run by several processes: a folder of its own, so that nothing beside it hides other modules."""

import sys

from piper.runtime.observe.probe import main

if __name__ == "__main__":
    main(sys.argv[1])
