"""How messages reach an agent: ``local`` is the agent in the launcher's own process."""
