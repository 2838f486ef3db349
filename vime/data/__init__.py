"""The nouns of the hand-over: a training row, the table of its columns, and the one form in which both travel."""
