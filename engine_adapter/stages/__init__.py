"""Pipeline stages whose ranges of layers move between ranks while requests run (docs/design/decisions.md).

Pure: cut.py, validity.py, move.py, orders.py. Scheduler: desk.py, refusal.py. Ranks: stage_rank.py, kv_transfer.py,
shelf.py.
"""
