"""A driver without a card, and machines with cards that are not here: see README.md beside it."""
