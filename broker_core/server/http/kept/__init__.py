"""What the door keeps between requests, with bounds: the history that plots show, and logins of browsers."""
