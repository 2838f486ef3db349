"""The data of the hand-over: a training row, the table of its columns, and the format in which both are stored."""
