"""How runs, records and the store are shown: in the terminal, as JSON, as a page with pictures."""
