"""Python runs this at its start in every process of a test that spawns workers: each must believe in V2 on CPUs."""

import os

if os.environ.get("FASER_TEST_V2_ON_CPU") == "1":
    import interpreter

    interpreter.install()
