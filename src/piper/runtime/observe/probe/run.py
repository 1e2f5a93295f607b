"""The script that several processes run. In its own folder, so that it shadows no module."""

import sys

from piper.runtime.observe.probe import main

if __name__ == "__main__":
    main(sys.argv[1])
