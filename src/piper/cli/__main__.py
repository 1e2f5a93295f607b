"""python -m piper.cli"""

from piper.cli import main

main()
