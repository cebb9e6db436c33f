"""Connections to training frameworks. Each module needs the framework it is named after; nothing else imports them."""
