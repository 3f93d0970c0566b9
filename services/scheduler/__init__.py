"""The scheduler service: decides which workers serve a request, and when. Carries no tokens."""
