"""Parts of scripts/bench."""
