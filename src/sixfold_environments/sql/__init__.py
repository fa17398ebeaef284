"""SQLite databases for agents: queries with limits, a bookshop with its tasks, and the tool."""
