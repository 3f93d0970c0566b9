"""The gateway service: the door. Owns a request from arrival to its last token."""
