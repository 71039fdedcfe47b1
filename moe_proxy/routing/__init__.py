"""Router maps and the prior made from them."""
