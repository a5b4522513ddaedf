// SPDX-License-Identifier: Apache-2.0
//! Rows whose positions stand for their tenants while these are there.

/// Puts the tenant into the first vacant slot, a new one if there is none. Its position.
pub fn occupy<T>(slots: &mut Vec<Option<T>>, tenant: T) -> usize {
    if let Some(slot) = slots.iter().position(Option::is_none) {
        slots[slot] = Some(tenant);
        return slot;
    }
    slots.push(Some(tenant));
    slots.len() - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slot_when_one_is_vacant_then_taken_before_a_new_one_is_made() {
        let mut slots = vec![Some('a'), None, Some('c')];
        assert_eq!(occupy(&mut slots, 'b'), 1);
        assert_eq!(occupy(&mut slots, 'd'), 3);
        assert_eq!(slots, ['a', 'b', 'c', 'd'].map(Some));
    }
}
