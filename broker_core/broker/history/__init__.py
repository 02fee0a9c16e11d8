"""The history of commits: what each has done, for a bounded time and in bounded bytes."""
