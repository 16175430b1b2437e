"""`faser demo`: a replayed production load on the embedded pair, with a report at the end."""
