"""Systems side by side: cases that take turns, ratios pair by pair, tables and figures."""
