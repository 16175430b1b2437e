"""The daemon: decision core, store, command line. The top floor."""
