"""Starts the driver."""

from benchmarks.gpu.driver import main

if __name__ == "__main__":
    main()
