"""The lab: where demonstrations and teacher targets come from, and what is kept of them."""
