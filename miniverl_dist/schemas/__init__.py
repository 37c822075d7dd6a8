"""Data contracts between the parts of the system; torch-free."""
