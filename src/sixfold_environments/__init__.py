"""Rewards, environments, tools and audits: maths, code, web, SQL, search, judges, gyms."""
