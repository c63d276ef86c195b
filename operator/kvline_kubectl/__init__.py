"""`kubectl kvline`: what a person asks of a service, and the few things they may tell it."""
