"""Runner and page of scripts/check_ecosystem.py."""
