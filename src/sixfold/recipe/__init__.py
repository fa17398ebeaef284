"""A recipe: its settings, its TOML form, and what follows from it before anything is loaded. No torch."""
