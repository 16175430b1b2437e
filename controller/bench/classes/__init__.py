"""`faser bench --classes`: requests with objectives of their own, by class, and who keeps every class's."""
