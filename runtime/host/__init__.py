"""Where does the state live, and what changes it?"""
