"""What the listener keeps between requests, with bounds: the history that plots show, logins of browsers."""
