"""From how workers ended and what they last said to the first cause, in words and as data."""
