"""Pages and text of things with controls: labs and plans."""
