"""Recipe: its settings, its TOML form, and the plan derived from it before loading. No torch."""
