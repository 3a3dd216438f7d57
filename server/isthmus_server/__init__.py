"""The server: plans rounds, coordinates participants, updates the model and records every round.

Reading order: `coordinator`, `regimes`, `strategy`, `model`, `store`, `link`.
"""
