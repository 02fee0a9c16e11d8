"""Who is asked in a cluster, over which connection, and when again."""
