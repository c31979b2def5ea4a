"""Who is let in, what tenants may take, and what is given up under pressure."""
